"""Facts and outcomes as frozen values: problems, masks, variants, trials, entries, devices. Standard library only."""
