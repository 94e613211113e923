"""Where bytes are: URLs, the stores behind them, their credentials and the local cache."""
