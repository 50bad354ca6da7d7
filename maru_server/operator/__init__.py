"""The operator's command ``maru``: look at a running server, change what it keeps, and find out why an engine does not use it.

Every command asks the server over its ordinary protocol, as one more client; none starts a server, and none touches a pool
but ``doctor``, which maps it as a client does.
"""
