"""The tensors of one attention call: operands, block tables, offsets of packed sequences."""
