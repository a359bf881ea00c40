// Work items taken from one counter by all workers, and the memory they work in.

template <class F>
void for_each(const Team& team, int64_t items, const F& body) {
  const int workers = static_cast<int>(lesser<int64_t>(team.threads, items));
  if (workers <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i, 0);
    return;
  }
  struct Shared {
    const F* body;
    int64_t items, next;
  } shared{&body, items, 0};
  team.run(
      [](void* context, int worker) {
        auto* s = static_cast<Shared*>(context);
        for (;;) {
          const int64_t i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
          if (i >= s->items) return;
          (*s->body)(i, worker);
        }
      },
      &shared, workers);
}

// One allocation for all the scratch of a call, carved into aligned pieces.  The same sequence of
// take() calls is run twice: once to measure, once to hand out.
class Workspace {
 public:
  template <class F>
  explicit Workspace(const F& layout) {
    layout(*this);
    base_ = static_cast<char*>(allocate(used_));
    used_ = 0;
    layout(*this);
  }
  ~Workspace() { release(base_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  template <class X>
  void take(X*& pointer, int64_t count) {
    pointer = base_ ? reinterpret_cast<X*>(base_ + used_) : nullptr;
    used_ += ceil_to(count * static_cast<int64_t>(sizeof(X)), kAlignment);
  }

 private:
  static constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector
  char* base_ = nullptr;
  int64_t used_ = 0;
};
