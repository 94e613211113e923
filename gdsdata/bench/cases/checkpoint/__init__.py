"""case=checkpoint: a state is saved, loaded, and saved in the background."""
