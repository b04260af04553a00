"""torch.ops.autoattn.attention: the operator that torch.compile, torch.export and FakeTensors see."""
