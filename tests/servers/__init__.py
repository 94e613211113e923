"""Object stores for tests: real servers, and one that injects faults."""
