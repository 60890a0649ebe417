"""CNTK's way of training: its names, over the parts of torchmn."""

from torchmn.cntk import device as device
from torchmn.cntk import io as io
from torchmn.cntk import learner as learner
from torchmn.cntk import learners as learners
from torchmn.cntk import logging as logging
from torchmn.cntk import losses as losses
from torchmn.cntk import metrics as metrics
from torchmn.cntk import readers as readers
from torchmn.cntk import schedules as schedules
from torchmn.cntk import train as train
from torchmn.cntk.learner import *  # noqa: F403
from torchmn.cntk.learners import *  # noqa: F403
from torchmn.cntk.logging import *  # noqa: F403
from torchmn.cntk.losses import *  # noqa: F403
from torchmn.cntk.readers import *  # noqa: F403
from torchmn.cntk.schedules import *  # noqa: F403
from torchmn.cntk.train import *  # noqa: F403
from torchmn.cntk.train.distributed import *  # noqa: F403

_OFFERED = (learner, learners, logging, losses, readers, schedules, train, train.distributed)
__all__ = sorted({name for module in _OFFERED for name in module.__all__})
