"""What a loop waited for: reports, and spans in a profiler's trace."""
