"""The control plane of elastic ML training in one daemon."""

from forged.errors import ConfigError, ForgedError, NotLeader, PeerError, RequestRefused, Unavailable
from forged.version import VERSION

__version__ = VERSION
__all__ = ["ConfigError", "ForgedError", "NotLeader", "PeerError", "RequestRefused", "Unavailable", "__version__"]
