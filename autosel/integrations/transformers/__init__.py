"""Patch a Hugging Face model with `autosel.patch(model)`: its attention, norms, rotary embeddings, gated MLPs and
projections run decided kernels. `autosel.unpatch(model)` restores it.

    patch       patch, unpatch; refuses models that cannot be patched
    plan        finds the modules of each kind, proves them, collects the reasons for the others
    linear  norms  mlp  rotary  attention      prove a module of a kind, and make its replacement
    coded       the same for linear layers whose weights are codes
    layer_format    names the format of a quantised layer
    whole       runs decode steps by one native call, where a decision says so
    forward     copies attention's forward, so that it calls the replacements
    cache       layers of a dynamic cache that grow in place
    masks       reads attention masks
    proof       the checks that all kinds share

Modules are replaced one by one. Other models of the same class do not change, nor do the model's configuration, its
masks and transformers' registries. Before a module is replaced, checks against the op's float64 reference show that the
module computes the op, and that the replacement is correct, on the module's own weights and device. Calls that need a
gradient, that come from another device, or that the ops do not describe, run the module's own code: attention falls
back to the implementation that the model was loaded with.
"""
