"""Parts of chains that are wrong, by what replaces what, and the graph that shows it."""

from dataclasses import replace

from torchmn.nn import chain_graph, chain_list, pipeline


class AddsMeans(pipeline._Step):
    """Adds the losses of micro-batches instead of weighting them."""

    def _loss(self, link, output, microbatch, samples):
        self._batch = replace(self._batch, is_mean=False)
        return super()._loss(link, output, microbatch, samples)


class EqualParts(pipeline._Step):
    """Weights micro-batches equally, though the last ones are smaller."""

    def _loss(self, link, output, microbatch, samples):
        equal = replace(samples, of_part=1, of_batch=min(self._num_parts, samples.of_batch))
        return super()._loss(link, output, microbatch, equal)


class OneGradient(pipeline._Step):
    """Takes the gradient of one rank that has used an output."""

    def _backward(self, link, microbatch, index):
        edges = self._graph.outgoing.get(link.key, [])
        for edge in edges[1:]:
            self._messages.delivery(pipeline.Place(pipeline.BACKWARD, edge, microbatch, self._call))
        self._graph.outgoing[link.key] = edges[:1]
        try:
            super()._backward(link, microbatch, index)
        finally:
            self._graph.outgoing[link.key] = edges


class Unordered(chain_graph.ChainGraph):
    """Gives a link its inputs in the order of ranks."""

    def __post_init__(self):
        super().__post_init__()
        for edges in self.incoming.values():
            edges.sort(key=lambda edge: edge.source.key)


class LastFirst(chain_graph.ChainGraph):
    """Matches several connections of two ranks from the last one."""

    def _connect(self):
        edges = super()._connect()
        pairs = {(e.source.rank, e.target.rank) for e in edges}
        connected = []
        for pair in sorted(pairs):
            between = [e for e in edges if (e.source.rank, e.target.rank) == pair]
            for edge, other in zip(between, reversed(between), strict=True):
                connected.append(replace(edge, number=len(connected), source=other.source))
        return connected


class NoDelegates(chain_list.ForwardPass):
    """Lets backward reach only what the output depends on here."""

    def _connected(self, output):
        return output
