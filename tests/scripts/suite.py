"""All user scripts, in the order of the page."""

from . import (
    buffers,
    clipping,
    compiled,
    copies,
    datasets,
    exceptions,
    gradients,
    growing,
    layers,
    loaders,
    losses,
    memory,
    normalization,
    optimizers,
    parameters,
    passes,
    precision,
    rates,
    tasks_perception,
    tasks_representation,
    tasks_training,
    whole_loaders,
)
from .registry import SCRIPTS, Script

_MODULES = (
    clipping,
    gradients,
    passes,
    losses,
    parameters,
    growing,
    layers,
    normalization,
    buffers,
    optimizers,
    rates,
    precision,
    memory,
    compiled,
    copies,
    exceptions,
    loaders,
    whole_loaders,
    datasets,
    tasks_perception,
    tasks_representation,
    tasks_training,
)


def chapters() -> dict[str, list[Script]]:
    """The scripts of each module under its title, which is the module's docstring."""
    return {module.__doc__.strip().rstrip("."): SCRIPTS[module.__name__] for module in _MODULES}


def all_scripts() -> list[Script]:
    """In the order of the page."""
    return [script for scripts in chapters().values() for script in scripts]
