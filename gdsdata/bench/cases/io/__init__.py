"""case=io: transfers of one size, as gdsio lists them."""
