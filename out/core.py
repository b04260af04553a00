import os,sys,time,itertools,traceback
os.environ["TRITON_INTERPRET"]="1"
sys.path[:0]=["tests"]
import torch; torch.set_num_threads(1)
import kernels
from autoattn import render, validate
from autoattn.compile import load
from autoattn.problem import *
from autoattn.mask import Mask
from autoattn.variant import Traits
CPU=torch.device("cpu")
def kinds():
    M=Modifiers
    base=dict(dtype=DType.FLOAT16)
    packed=dict(layout=Layout.PACKED,tokens_q=66,tokens_kv=100)
    yield "full",{},{}
    yield "causal",{"mask":"causal"},{}
    yield "causal branch",{"mask":"causal"},{"mask_loop":"branch"}
    for w in ("window:128,0","window:128,-1","window:-1,128","window:128,128"):
        for ml in ("split","every","branch"):
            yield w+ml,{"mask":w},{"mask_loop":ml}
        yield w+"first",{"mask":w},{"softmax":"first_max"}
    yield "lazy win",{"mask":"window:128,128"},{"softmax":"lazy","PERSISTENT":2}
    yield "packed",packed,{}
    yield "packed causal",packed|{"mask":"causal"},{}
    yield "packed win",packed|{"mask":"window:9,3"},{"HEAD_GROUP":4,"PERSISTENT":1}
    yield "split80",{"head_dim":80},{"HEAD_SPLIT":1}
    yield "split72/40 causal",{"head_dim":72,"head_dim_v":40,"mask":"causal"},{"HEAD_SPLIT":1}
    yield "dv",{"head_dim":16,"head_dim_v":64},{}
    yield "dv odd",{"head_dim":33,"head_dim_v":17,"mask":"causal"},{}
    for b in (Bias.KEYS,Bias.BOOLEAN,Bias.ADDITIVE):
        yield b.value,{"modifiers":M(bias=b)},{}
        yield b.value+" causal",{"modifiers":M(bias=b),"mask":"causal"},{"softmax":"lazy"}
    yield "softcap",{"modifiers":M(softcap=True)},{}
    yield "alibi",{"modifiers":M(alibi=True),"mask":"causal"},{}
    yield "alibi packed",packed|{"modifiers":M(alibi=True),"mask":"causal"},{}
    yield "sinks",{"modifiers":M(sinks=True),"mask":"causal"},{}
    yield "sinks packed",packed|{"modifiers":M(sinks=True)},{}
    yield "dropout",{"modifiers":M(dropout=True),"mask":"causal"},{}
    yield "dropout packed",packed|{"modifiers":M(dropout=True)},{}
    yield "all",{"modifiers":M(dropout=True,softcap=True,alibi=True,sinks=True,bias=Bias.ADDITIVE,score_mod="score * 0.5 + 0.01 * (q_idx - kv_idx) % 7"),"mask":"window:9,3"},{}
    yield "score",{"modifiers":M(score_mod="captured0: float32[1]\nwhere(q_idx - kv_idx > 12, tanh(score), score * captured0[h])")},{}
    yield "score packed",packed|{"modifiers":M(score_mod="captured0: int32[2]\nscore + 0.1 * captured0[b, kv_idx]")},{}
    yield "blocks",{"mask":"blocks:16x16,0.5"},{}
    yield "blocks32",{"mask":"blocks:32x64,0.5"},{"softmax":"lazy"}
    yield "blocks fm",{"mask":Mask.blocks(32,32,0.6,"kv_idx % 5 != q_idx % 3")},{"softmax":"first_max"}
    yield "blocks mod",{"mask":Mask.blocks(32,32,0.6,"captured0: int32[1]\n(captured0[q_idx] == captured0[kv_idx]) | (kv_idx % 3 == h)")},{}
    yield "fp32",{"dtype":DType.FLOAT32},{}
    yield "tf32x3",{"dtype":DType.FLOAT32,"precision":Precision.TF32X3},{}
    yield "fp8",{"dtype":DType.FLOAT8,"mask":"causal"},{}
want=sys.argv[1:] 
bad=0
for name,changes,params in kinds():
    if want and not any(w in name for w in want): continue
    t=time.time()
    try:
        one=kernels.problem(**changes)
        tr=render.natural_traits(one,lse=True)
        src=render.render(one,kernels.variant(**params),tr)
        gate=validate.Gate(one,CPU,tiny=True)
        v=gate.judge(load(src,CPU))
        if not v.ok: bad+=1
        print("ok " if v.ok else "BAD",name,v.checks,f"{v.max_error:.3g} of {v.allowed:.3g}",v.reason,f"{time.time()-t:.1f}s")
    except Exception as e:
        bad+=1; print("EXC",name,type(e).__name__,str(e)[:600]); 
        if want: traceback.print_exc()
print("bad",bad)
