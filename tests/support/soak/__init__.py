"""A long and eventful life of an optimizer: a random script, the same on all ranks, and
an oracle that lives it alone.

The oracle has no process group and plays every rank in turn: gradients by autograd on a
plain model, summed in rank order in fp32, times fp32(1 / W), added up as each stage's
rules say, and given to AdamW in a world of one. So both sides do the same operations in
the same order, and every weight must have the same bits.
"""
