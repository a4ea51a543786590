"""`make demo`: the whole of DisaggKD on one machine, in a few minutes, with nothing to download."""
