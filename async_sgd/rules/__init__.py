"""Rules of the outer step as pure functions: outer optimizers, merging, penalty, staleness, filtering."""
