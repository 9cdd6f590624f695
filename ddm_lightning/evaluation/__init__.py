"""Show and score generated images, and score routers."""
