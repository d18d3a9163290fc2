#!/usr/bin/env python
# coding: utf-8
# ruff: noqa

# # Digits

# In[1]:


import torch
from sklearn.datasets import load_digits
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


# In[2]:


X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X).float() / 16, torch.tensor(y)
X.shape


# In[3]:


net = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)
crit = nn.CrossEntropyLoss()


# In[4]:


losses = []
for i in range(30):
    idx = torch.randperm(len(X))[:64]
    opt.zero_grad()
    l = crit(net(X[idx]), y[idx])
    l.backward()
    opt.step()
    sched.step()
    losses.append(l.item())
    print("loss", l.item().hex())


# In[5]:


with torch.no_grad():
    acc = (net(X).argmax(1) == y).float().mean()
acc
