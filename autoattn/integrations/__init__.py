"""autoattn inside other libraries: adapters of their attention contracts to `autoattn.attention`."""
