// A decode step of ik_llama.cpp behind four functions, so that a benchmark depends on its header and not on the layout
// of its structs (benchmarks/ik_llama.py).

#include "llama.h"

#include <cstdint>

namespace {
struct Stream {
  llama_context *context;
  llama_batch batch;
};
void say_nothing(ggml_log_level, const char *, void *) {}
} // namespace

extern "C" void *ik_model(const char *path, bool repack) {
  llama_log_set(say_nothing, nullptr);
  llama_backend_init();
  llama_model_params wanted = llama_model_default_params();
  wanted.n_gpu_layers = 0;
  wanted.use_mmap = false;
  wanted.repack_tensors = repack;
  return llama_model_load_from_file(path, wanted);
}

extern "C" void *ik_stream(void *model, int tokens, int batch, int threads, bool flash) {
  llama_context_params wanted = llama_context_default_params();
  wanted.n_ctx = static_cast<uint32_t>(tokens);
  wanted.n_batch = wanted.n_ubatch = static_cast<uint32_t>(batch);
  wanted.n_threads = wanted.n_threads_batch = static_cast<uint32_t>(threads);
  wanted.flash_attn = flash;
  llama_context *made = llama_init_from_model(static_cast<llama_model *>(model), wanted);
  return made ? new Stream{made, llama_batch_init(batch, 0, 1)} : nullptr;
}

// Runs tokens from position `first` on; returns the logits of the last one, null for a failure.
extern "C" const float *ik_feed(void *stream, const int32_t *tokens, int count, int first) {
  auto *s = static_cast<Stream *>(stream);
  s->batch.n_tokens = count;
  for (int i = 0; i < count; i++) {
    s->batch.token[i] = tokens[i];
    s->batch.pos[i] = first + i;
    s->batch.n_seq_id[i] = 1;
    s->batch.seq_id[i][0] = 0;
    s->batch.logits[i] = i == count - 1;
  }
  return llama_decode(s->context, s->batch) ? nullptr : llama_get_logits_ith(s->context, count - 1);
}

// Forgets the cache's tokens from position `first` on.
extern "C" void ik_rewind(void *stream, int first) {
  llama_kv_cache_seq_rm(static_cast<Stream *>(stream)->context, 0, first, -1);
}
