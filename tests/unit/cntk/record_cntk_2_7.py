"""Writes recorded_cntk_2_7.json: run it by a Python 3.6 that has CNTK 2.7.

``python record_cntk_2_7.py`` in this folder.
"""

import json
import sys

import cntk
import numpy as np
from learner_cases import SIZES, cases


def history(make):
    """The parameters after each minibatch, as in test_learners.py."""
    x, y = cntk.input_variable(3), cntk.input_variable(1)
    weights = cntk.parameter((3, 1), init=np.array([[0.5], [-0.3], [0.02]], dtype=np.float32))
    bias = cntk.parameter((1,), init=np.array([0.1], dtype=np.float32))
    output = cntk.times(x, weights) + bias
    loss = cntk.reduce_sum(cntk.square(output - y))
    trainer = cntk.Trainer(output, loss, [make([weights, bias])])
    found = []
    for index, n in enumerate(SIZES):
        random = np.random.RandomState(index)
        values = [random.randn(n, 3), random.randn(n, 1)]
        values = [value.astype(np.float32) for value in values]
        trainer.train_minibatch({x: values[0], y: values[1]})
        row = [*weights.value.ravel(), *bias.value.ravel()]
        found.append([round(float(value), 9) for value in row])
    return found


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    with open("recorded_cntk_2_7.json", "w") as file:
        json.dump({name: history(make) for name, make in cases(cntk).items()}, file)
