"""autoattn: attention kernels that are generated, searched, validated and measured for your shapes and your GPU."""
