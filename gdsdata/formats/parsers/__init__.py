"""Pure parsers: bytes in, structure or `CorruptData` out. They open no file."""
