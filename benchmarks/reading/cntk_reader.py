"""CNTK 2.7's own readers, for `bench_reading.py`: one sweep for each line of standard input.

Python 3.6. A line is JSON: {"kind": "ctf" or "images", "path", "streams" or "transforms",
"minibatch_size"}; the answer, on a line that begins with "= ", has samples, seconds and processor
seconds of all threads.
"""

import json
import resource
import sys
import time


def stream(cntk, name, dim, is_sparse):
    return name, cntk.io.StreamDef(field=name, shape=dim, is_sparse=is_sparse)


def deserializer(cntk, request):
    if request["kind"] == "ctf":
        streams = dict(stream(cntk, *entry) for entry in request["streams"])
        return cntk.io.CTFDeserializer(request["path"], cntk.io.StreamDefs(**streams))
    transforms = [
        getattr(cntk.io.transforms, name)(**options) for name, options in request["transforms"]
    ]
    streams = cntk.io.StreamDefs(
        features=cntk.io.StreamDef(field="image", transforms=transforms),
        labels=cntk.io.StreamDef(field="label", shape=5),
    )
    return cntk.io.ImageDeserializer(request["path"], streams)


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def sweep(cntk, request):
    begin, begin_cpu = time.perf_counter(), processor_seconds()
    source = cntk.io.MinibatchSource(deserializer(cntk, request), max_sweeps=1)
    first = source.stream_infos()[0]
    samples = 0
    while True:
        minibatch = source.next_minibatch(request["minibatch_size"])
        if not minibatch:
            break
        samples += minibatch[first].num_samples
    return {
        "samples": samples,
        "seconds": time.perf_counter() - begin,
        "processor_seconds": processor_seconds() - begin_cpu,
    }


def main():
    import cntk

    cntk.device.try_set_default_device(cntk.device.cpu())
    for line in sys.stdin:
        try:
            answer = sweep(cntk, json.loads(line))
        except Exception as error:
            answer = {"error": str(error).split("\n")[0]}
        print("\n= " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
