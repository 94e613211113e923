"""gdsdata in other frameworks. Each module is imported only when it is used."""
