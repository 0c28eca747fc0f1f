"""Simulation of hubs, nodes, their disks and the network between them: the classes of `aedit hub` themselves.

- `world`: virtual time, network, processes. `disk`: files in memory with what a crash takes back.
- `hub`, `node`: what calls the production classes. `accounts`: what was promised, and its check.
- `histories`: faults drawn from a seed, and the search for the shortest history that fails. `mutants`:
  production code with one mistake each, which must be found.
"""
