"""The functions of `safetensors`, on gdsdata's engine. `gdsdata.safetensors` is public."""
