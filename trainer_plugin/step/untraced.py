"""What a compiled training loop runs as it is, every time it comes to it.

Traced by `torch.compile`, the guard's calls and step hooks would decide once and for all what they decide at the first
step, or raise. Around them the graph is broken; with `fullgraph=True` torch says at the first step that it cannot be.
"""

from torch._compile import _disable_dynamo

# The lazy form, as in torch's own optimizers: `torch.compiler.disable` imports the whole compiler where it is written.
untraced = _disable_dynamo
