"""Command line: `aedit`. Begin at `main`, which has all commands; each imports its module when it runs.

arguments: the parser, and options of commands whose own modules import torch.
hub_peer, serve_options: options of `aedit hub`, `aedit peer` and `aedit serve`.
paths: the folder that an argument names.
export, anchors: read a model from a run, a hub's folder or a hub; write it.
policy, generate, serve_model: load a policy; generate text with it; serve it over HTTP.
audit, proof: check recorded rollouts of servers; check a proof against the owner of a part.
keys: certificates and tokens.
init, doctor: write a configuration file; check this machine.

`run` and `join` are in `launch.processes`, `hub` in `launch.hub`, the views in `launch.views`.
"""

from aedit.launch.cli.main import main

__all__ = ["main"]
