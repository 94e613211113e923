"""The libraries of the rows, a module each; `registry` finds the rows of a case."""
