"""Directives as recorded: from the source documents of the project, and from the manuals.

The documents are of 2017 and 2018 and of one site; their numbers are those of the inventory.
"""

from torchmn.submit.request import JobRequest
from torchmn.submit.settings import Settings

# The hands-on course on distributed training, job script of 2 nodes with 2 GPUs each.
PBS_OF_ROW_4_10 = """\
#PBS -q h-tutorial
#PBS -l select=2:mpiprocs=2:ompthreads=1
#PBS -W group_list=gt00
#PBS -l walltime=00:10:00
#PBS -N multi_node_training
"""

# sbatch(1): the long options, and `%x` and `%j` of its file name patterns.
SLURM_OF_THE_MANUAL = """\
#SBATCH --partition=h-tutorial
#SBATCH --account=gt00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --job-name=multi_node_training
#SBATCH --output=torchmn-logs/%x.%j.slurm.log
#SBATCH --no-requeue
"""

# submit(1) of Grid Engine 8.1.9, with the pseudo variables of ``-o``.
GRID_ENGINE_OF_THE_MANUAL = """\
#$ -N multi_node_training
#$ -q h-tutorial
#$ -P gt00
#$ -pe mpi 4
#$ -l h_rt=00:10:00
#$ -r n
#$ -cwd
#$ -S /bin/bash
#$ -j y
#$ -o torchmn-logs/$JOB_NAME.$JOB_ID.grid_engine.log
"""


def tutorial(file: str = "multi_node_training.sh", **settings: object) -> JobRequest:
    """The job of row 4-10."""
    return JobRequest(
        script="train_cifar_multi_node.py",
        args=("--no_snapshot", "--epoch", "4", "--batchsize", "32"),
        name="multi_node_training",
        file=file,
        num_nodes=2,
        ranks_per_node=2,
        settings=Settings(
            **{  # type: ignore[arg-type]
                "queue": "h-tutorial",
                "group": "gt00",
                "walltime": "00:10:00",
                "threads": 1,
                "join_output": True,
                **settings,
            }
        ),
    )
