"""gdsdata in other frameworks, each imported only when it is asked for."""
