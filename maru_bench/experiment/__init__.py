"""``maru-bench experiment``: what a cache tier is worth on real engines, under a load that is like one's own.

A *workload* is a list of requests (:mod:`workloads`, :mod:`traces`); a *mode* is a way to run the engines
(:mod:`modes`); a *cell* is one workload at one length of context and one concurrency. Each cell is driven
(:mod:`driver`) through a fleet of servers (:mod:`fleet`) in every mode, repeat by repeat and mode after mode
(:mod:`run`); what was seen is summed up (:mod:`summary`) and shown (:mod:`report`, :mod:`plots`, :mod:`page`).
"""
