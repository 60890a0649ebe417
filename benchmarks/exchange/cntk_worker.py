"""A worker of CNTK 2.7, which needs Python 3.6: the commands of `worker.py` with CNTK's learners.

The network is that of our side: a perceptron 784-1000-1000-10, 1.8 million parameters.
"""

import json
import os
import resource
import socket
import sys
import time
import traceback

import numpy as np

BATCH = 32
BLOCK_STEPS = 16


def learner_of(cntk, side, parameters, num_workers):
    """The distributed learner of a side, around the SGD with momentum that all sides use."""
    from cntk.train import distributed

    size = BATCH * num_workers
    local = cntk.momentum_sgd(
        parameters,
        cntk.learning_parameter_schedule(0.01, minibatch_size=size),
        cntk.momentum_schedule(0.9, minibatch_size=size),
        unit_gain=False,
    )
    if side == "CNTK block momentum":
        return distributed.block_momentum_distributed_learner(local, BLOCK_STEPS * size)
    bits = 1 if side == "CNTK 1 bit" else 32
    return distributed.data_parallel_distributed_learner(local, num_quantization_bits=bits)


def build(side):
    """A function that trains one step."""
    import cntk

    cntk.device.try_set_default_device(cntk.device.cpu())
    num_workers = cntk.train.distributed.Communicator.num_workers()
    images, labels = cntk.input_variable(784), cntk.input_variable(10)
    network = cntk.layers.Sequential(
        [
            cntk.layers.Dense(1000, activation=cntk.relu),
            cntk.layers.Dense(1000, activation=cntk.relu),
            cntk.layers.Dense(10),
        ]
    )(images)
    loss = cntk.cross_entropy_with_softmax(network, labels)
    learner = learner_of(cntk, side, network.parameters, num_workers)
    trainer = cntk.Trainer(network, (loss, None), [learner])
    generator = np.random.RandomState(rank())
    data = {
        images: generator.randn(BATCH, 784).astype(np.float32),
        labels: np.eye(10, dtype=np.float32)[generator.randint(10, size=BATCH)],
    }
    return lambda: trainer.train_minibatch(data)


def turn(step, lead_steps, steps):
    """As `worker.py`: seconds per step, after some that are not timed."""
    busy = time.process_time()
    for _ in range(lead_steps):
        step()
    clock, every = time.perf_counter(), time.process_time()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    every = (time.process_time() - every) / steps
    return {
        "seconds": (time.perf_counter() - clock) / steps,
        "main_thread_s": every,
        "all_threads_s": every,
        "page_faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps,
        "busy_s": time.process_time() - busy,
    }


def rank():
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def serve(address):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    stream = connection.makefile("rw")
    steps = {}
    reply = {"rank": rank()}
    while True:
        stream.write(json.dumps(reply) + "\n")
        stream.flush()
        line = stream.readline()
        if not line:
            os._exit(0)
        command = json.loads(line)
        reply = {}
        try:
            if command["command"] == "build":
                steps[command["side"]] = build(command["side"])
                for _ in range(20):
                    steps[command["side"]]()
            elif command["command"] == "turn":
                reply = turn(steps[command["side"]], command["lead_steps"], command["steps"])
        except Exception:
            reply = {"failed": traceback.format_exc()}


if __name__ == "__main__":
    serve(sys.argv[1])
