"""What is known to be wrong: these tests are expected to fail, and fail if they pass."""

from __future__ import annotations

_CASES: dict[str, tuple[str, ...]] = {
    "`p.grad` shares the memory of a bucket": (
        "file_of_a_gradient-every_step_next_forward-2",
        "numpy_of_a_gradient-every_step_next_forward-2",
        "similarity_of_gradients-every_step_next_forward-2",
    ),
    "other memory takes a parameter or a gradient out of the exchange": (
        "float_in_the_middle-every_step_next_forward-2",
        "half_and_back-every_step_next_forward-2",
        "parameters_swapped-every_step_next_forward-2",
        "replace_data_of_gradients-every_step_next_forward-2",
    ),
    "recomputed or compiled forwards are counted wrongly": (
        "compiled_weighted_by_samples-every_step_next_forward-2",
    ),
    "gradients of parameters that the optimizer does not have are not exchanged": (
        "clip_more_than_is_trained-auto-2",
        "clip_more_than_is_trained-every_step-2",
        "clip_more_than_is_trained-every_step_next_forward-2",
    ),
    "the mean over ranks has no graph, which torch says in its own words": (
        "curvature-auto-2",
        "curvature-every_step-2",
        "curvature-every_step_next_forward-2",
    ),
    "Dynamo warns of a hook of torchmn": (
        "compiled_before_wrapping-every_step_next_forward-2",
        "compiled_in_place-every_step_next_forward-2",
    ),
    "a deferred mean or update is not seen": (
        "average_by_foreach-every_step_next_forward-2",
        "averaged_model_evaluated-every_step_next_forward-2",
        "clamp_parameters-every_step_next_forward-2",
        "clip_by_maximum_norm-every_step_next_forward-2",
        "clip_by_norm-every_step_next_forward-2",
        "clip_by_value-every_step_next_forward-2",
        "drop_some_gradients-every_step_next_forward-2",
        "edit_through_data-every_step_next_forward-2",
        "extra_gradient-every_step_next_forward-2",
        "gan-every_step_next_forward-2",
        "gradient_noise-every_step_next_forward-2",
        "graph_cut_in_two-every_step_next_forward-2",
        "graph_cut_in_two_weighted_by_samples-every_step_next_forward-2",
        "language_model-every_step_next_forward-2",
        "log_gradient_norms-every_step_next_forward-2",
        "log_norms_after_step-every_step_next_forward-2",
        "lookahead-every_step_next_forward-2",
        "moving_average-every_step_next_forward-2",
        "parameters_from_a_vector-every_step_next_forward-2",
        "pcgrad-every_step_next_forward-2",
        "pruned-every_step_next_forward-2",
        "replace_gradients-every_step_next_forward-2",
        "sharpness_aware-every_step_next_forward-2",
        "step_left_out_by_norm-every_step_next_forward-2",
        "stochastic_weight_averaging-every_step_next_forward-2",
        "sum_of_losses-every_step_next_forward-2",
        "truncated_backpropagation-every_step_next_forward-2",
        "two_losses_of_one_graph-every_step_next_forward-2",
        "two_losses_weighted_by_samples-every_step_next_forward-2",
        "update_by_hand-every_step_next_forward-2",
        "wasserstein_gan-every_step_next_forward-2",
        "graph_cut_in_two_weighted_by_samples-every_step_next_forward-2",
        "two_losses_weighted_by_samples-every_step_next_forward-2",
    ),
}

KNOWN_DEFECTS = {
    (name, schedule, int(size)): reason
    for reason, cases in _CASES.items()
    for name, schedule, size in (case.split("-") for case in cases)
}
"""By script, schedule and number of ranks, why."""
