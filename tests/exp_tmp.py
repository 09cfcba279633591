import tests.test_low_bit_optim as T
from shardtune import low_bit_optim, moments
import torch
for s in (300,500,800):
    p=T.Regression(); print(s,[p.loss_after(s,k) for k in ("fp32","bf16","int8")], flush=True)
keep=low_bit_optim.noise; low_bit_optim.noise=lambda n,k: torch.full_like(n,0x7fff7fff)
print("naive",[T.Regression().loss_after(s,"bf16") for s in (300,500,800)])
low_bit_optim.noise=keep
p=T.Regression(scales=True)
print("scales",[p.loss_after(300,k) for k in ("fp32","bf16","int8")])
kept=moments.to_codes
def tc(values,chance,*,signed):
    c,s=kept(values,chance,signed=signed)
    return (torch.where(c==1,0,c).to(torch.uint8) if not signed else c),s
moments.to_codes=tc
print("no clamp", p.loss_after(300,"int8"))
