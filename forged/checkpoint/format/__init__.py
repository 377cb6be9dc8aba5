"""The checkpoint format: manifest, tree of arrays, boxes, compression and safetensors files."""
