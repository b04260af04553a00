import os; os.environ["TRITON_INTERPRET"]="1"
import torch, triton, triton.language as tl
@triton.jit
def k(x,y,N: tl.constexpr):
    o=tl.arange(0,N); tl.store(y+o, tl.load(x+o).to(tl.float8e4nv))
x=torch.rand(64)*256; y=torch.empty(64,dtype=torch.float8_e4m3fn)
k[(1,)](x,y,64)
r=x.to(torch.float8_e4m3fn).float(); print((y.float()-r).abs().max(), (y.float()-x).mean(), (r-x).mean())
a=torch.randn(64).to(torch.float8_e4m3fn)
@triton.jit
def k2(x,y,N: tl.constexpr):
    o=tl.arange(0,N); tl.store(y+o, tl.load(x+o).to(tl.float32))
z=torch.empty(64); k2[(1,)](a,z,64); print((z-a.float()).abs().max())
