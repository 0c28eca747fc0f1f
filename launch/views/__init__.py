"""Views of a run for terminal, plots and report. They only read the run directory or ask the hub.

None imports torch.
"""
