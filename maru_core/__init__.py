"""What every part of Maru shares: the pool format and its mapping, the wire protocol, the client session, the movers.

Imports no torch, no engine, and none of the other Maru packages.
"""

__version__ = "0.1.0"
