"""Learners that `torchmn.cntk` and CNTK 2.7 are called for identically.

Runs under CNTK's Python 3.6 as well, so no later syntax here.
"""

from typing import Any

SIZES = [4, 4, 2, 5, 3]  # samples of the minibatches


def cases(C: Any) -> Any:
    """Learners by name: functions of the parameters."""
    # CNTK changes a schedule that it is given, so each learner gets its own.
    sample = C.UnitType.sample

    def per_sample() -> Any:
        return C.learning_rate_schedule(0.02, sample)

    def per_minibatch() -> Any:
        return C.learning_rate_schedule(0.08, C.UnitType.minibatch)

    def changing() -> Any:
        return C.learning_rate_schedule([0.02, 0.01, 0.04], sample, 6)

    def momentum(value: float) -> Any:
        return C.momentum_schedule(value)

    def time(samples: float) -> Any:
        return C.momentum_as_time_constant_schedule(samples)

    def sgd(**options: Any) -> Any:
        return lambda p: C.sgd(p, per_sample(), **options)

    def momentum_sgd(**options: Any) -> Any:
        return lambda p: C.momentum_sgd(p, per_sample(), momentum(0.9), **options)

    def nesterov(**options: Any) -> Any:
        return lambda p: C.nesterov(p, per_sample(), momentum(0.9), **options)

    def adam(rate: Any = per_sample, **options: Any) -> Any:
        return lambda p: C.adam(
            p, rate(), momentum(0.9), variance_momentum=momentum(0.99), **options
        )

    def adagrad(**options: Any) -> Any:
        return lambda p: C.adagrad(p, per_sample(), **options)

    def rmsprop(rate: Any = per_sample, **options: Any) -> Any:
        return lambda p: C.rmsprop(p, rate(), **rms, **options)

    rms = {"gamma": 0.9, "inc": 1.2, "dec": 0.7, "max": 10, "min": 0.01}
    clip = {"gradient_clipping_threshold_per_sample": 0.3}
    norm = {**clip, "gradient_clipping_with_truncation": False}
    return {
        "sgd_sample": sgd(),
        "sgd_minibatch": lambda p: C.sgd(p, per_minibatch()),
        "sgd_float": lambda p: C.sgd(p, 0.08),
        "sgd_ref8": lambda p: C.sgd(p, C.learning_parameter_schedule(0.08, minibatch_size=8)),
        "sgd_l2_sample": sgd(l2_regularization_weight=0.1),
        "sgd_l1_sample": sgd(l1_regularization_weight=0.1),
        "sgd_trunc": sgd(**clip),
        "sgd_norm": sgd(**norm),
        "sgd_norm_l2": sgd(l2_regularization_weight=0.1, **norm),
        "sgd_mean": sgd(use_mean_gradient=True),
        "sgd_mean_l1": sgd(use_mean_gradient=True, l1_regularization_weight=0.1),
        "schedule_pairs": lambda p: C.sgd(
            p, C.learning_rate_schedule([(1, 0.02), (1, 0.01), (0, 0.04)], sample, 6)
        ),
        "sweeps": lambda p: C.sgd(p, C.learning_rate_schedule([0.02, 0.01], sample)),
        "mom_sample": momentum_sgd(),
        "mom_minibatch": lambda p: C.momentum_sgd(p, per_minibatch(), momentum(0.9)),
        "mom_time": lambda p: C.momentum_sgd(p, per_sample(), time(20)),
        "mom_ref8": lambda p: C.momentum_sgd(
            p, per_sample(), C.momentum_schedule(0.9, minibatch_size=8)
        ),
        "mom_nogain": momentum_sgd(unit_gain=False),
        "mom_mean": momentum_sgd(use_mean_gradient=True),
        "mom_list": lambda p: C.momentum_sgd(
            p, [0.08, 0.04], [0.9, 0.5], epoch_size=6, minibatch_size=8
        ),
        "schedule": lambda p: C.momentum_sgd(
            p, changing(), C.momentum_as_time_constant_schedule([0, 20], epoch_size=6)
        ),
        "nag_sample": nesterov(),
        "nag_nogain": nesterov(unit_gain=False),
        "nag_lr_changes": lambda p: C.nesterov(p, changing(), momentum(0.9)),
        "adam_var": adam(),
        "adam_eps": adam(epsilon=0.1),
        "adam_time": lambda p: C.adam(p, per_minibatch(), time(20), variance_momentum=time(200)),
        "adam_mean": adam(epsilon=0.1, use_mean_gradient=True),
        "adam_lr_changes": adam(changing),
        "adamax": adam(adamax=True),
        "adagrad": adagrad(),
        "adagrad_noave": adagrad(need_ave_multiplier=False),
        "adagrad_mean": adagrad(use_mean_gradient=True),
        "rmsprop": rmsprop(),
        "rmsprop_noave": rmsprop(need_ave_multiplier=False),
        "rmsprop_mean_mb": rmsprop(per_minibatch, use_mean_gradient=True),
    }
