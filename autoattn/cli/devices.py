"""`autoattn devices`: the GPUs that autoattn can tune for."""

from __future__ import annotations

from autoattn.cli import options

EXAMPLES = "Example: [bold]autoattn devices --json[/]"


def command(json: options.Json = False) -> None:
    """List the GPUs that autoattn knows, and say which one is in this machine."""
    from autoattn.cli import terminal
    from autoattn.core import device_profiles
    from autoattn.hardware import nvidia

    present = nvidia.present()
    known = list(device_profiles.all_devices())
    if present is not None and present.name not in {device.name for device in known}:
        known.append(present)
    if json:
        terminal.print_json({"present": present, "devices": known})
        return
    rows = [
        (
            device.name,
            device.full_name,
            f"sm_{device.arch}",
            device.sm_count,
            f"{device.shared_bytes_per_block // 1024} KiB",
            f"{device.l2_bytes / 2**20:.0f} MiB",
            f"{device.bandwidth / 1e12:.2f} TB/s",
            f"{device.peak_flops['float16'] / 1e12:.0f}" if "float16" in device.peak_flops else "-",
            ", ".join(device.aliases),
        )
        for device in known
    ]
    columns = ("=Name", "GPU", "Arch", ">SMs", ">Shared/block", ">L2", ">Memory", ">fp16 TFLOP/s", "Also called")
    console = terminal.console()
    terminal.print_table(console, "Devices", columns, rows)
    if present is None:
        console.print("No NVIDIA GPU was found in this machine: tuning predicts, it does not measure.")
    else:
        console.print(f"In this machine: {present.full_name} ({present.name}).")
