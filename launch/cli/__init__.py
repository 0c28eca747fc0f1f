"""Command line: `aedit`. Begin at `main`, which has all commands; each imports its module when it runs.

arguments: the parser; options and checks of commands whose own modules import torch.
service_options: options of `aedit hub`, `aedit peer` and `aedit serve`.
export: read a model from a run, a hub's folder or a hub; write it.
policy, generate, serve_model: load a policy; generate text with it; serve it over HTTP.
audit: check recorded rollouts of servers.
keys: certificates and tokens.
init, doctor: write a configuration file; check this machine.

`run` and `join` are in `launch.processes`, `hub` in `launch.hub`, the views in `launch.views`.
"""

from aedit.launch.cli.main import main

__all__ = ["main"]
