import os; os.environ["TRITON_INTERPRET"]="1"
import sys; sys.path[:0]=["tests"]
import torch, kernels
from autoattn import render, validate, reference, inputs
from autoattn.compile import load
from autoattn.problem import *
CPU=torch.device("cpu")
one=kernels.problem(dtype=DType.FLOAT8,seq_q=17,seq_kv=34)
g=torch.Generator().manual_seed(0)
ops=inputs.make(one,CPU,g)
exp,lse=reference.attention(one,ops)
low=reference.low_precision(one,ops)
src=render.render(one,kernels.variant(),render.natural_traits(one,lse=True))
c=validate.case_of(one,ops,g)
out,l=validate.run(load(src,CPU),c)
print((out.double()-exp).abs().max(),(low-exp).abs().max(), (l-lse).abs().max(), exp.abs().max(), (out.double()/exp).median(), c.allowed)
print(ops.query_scale)
