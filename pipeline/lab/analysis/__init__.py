"""What a model does with texts, measured on its own weights: `cairn analyse`.

    model ─▶ traced pass     states of every layer, heads of every attention
    texts ─▶ pieces       ─▶ low-pass filter       Length Collapse: theorems 2 and 3, eq. 4 and 5, by length
                          ─▶ similarity            by length, at several τ, beside flow and whitening
                          ─▶ attention by position LMK figure 2: where pooled positions look
                          ─▶ landmark sides        LMK §6.4: which neighbour a landmark's vector resembles

Each module measures arrays; ``report`` draws the pieces, runs the model and puts what was found in words.
"""
