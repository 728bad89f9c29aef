"""Parts of the register, one module per table or two. From outside, import `batch_assets.stores.register`."""
