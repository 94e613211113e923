"""The libraries that rows are measured with, a module each; `registry` finds a case's rows."""
