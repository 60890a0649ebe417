"""The names of all environment variables of torchmn, one constant each.

``docs/reference/environment.md`` describes them. Users set some of them; the others are set by one
process of torchmn for another.
"""

from __future__ import annotations

BACKEND_VARIABLE = "TORCHMN_BACKEND"
EXIT_TIMEOUT_VARIABLE = "TORCHMN_EXIT_TIMEOUT_S"
JOB_END_VARIABLE = "TORCHMN_JOB_END"
MONITOR_VARIABLE = "TORCHMN_MONITOR"
REPLICA_SOCKET_VARIABLE = "TORCHMN_REPLICAS"
ROUND_VARIABLE = "TORCHMN_ROUND"
RSH_VARIABLE = "TORCHMN_RSH"
SECRET_VARIABLE = "TORCHMN_SECRET"
SUPERVISOR_VARIABLE = "TORCHMN_SUPERVISOR"
TRACEBACK_VARIABLE = "TORCHMN_TRACEBACK"
TRANSPORT_VARIABLE = "TORCHMN_TRANSPORT"
