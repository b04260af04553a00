"""Search spaces and rendered kernels: from YAML and Jinja templates to a kernel's source."""
