"""Reports of what a loop waited for, and spans in a profiler's trace."""
