"""``maru-bench peers``: Maru beside what people use today, on the same pages and chains, by turns in one run.

Each peer runs as two processes of its own interpreter (:mod:`worker`): one stores, the other asks what is there and loads
it, as two engines do. What each peer is told to do, and how it is done through the calls that SGLang uses, is in
:mod:`adapters`; :mod:`start` starts and stops them and says why one is left out; :mod:`run` has the rounds, :mod:`report`
the table. Two limits stand beside them: one memcpy for each fragment, and a ZeroMQ echo of as many bytes as Maru's lookup has.
"""
