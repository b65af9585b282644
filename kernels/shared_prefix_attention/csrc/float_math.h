// Products and weights in float, for vectors of any width.
#pragma once
#include <cmath>

#include "register_pass.h"

namespace {

template <class V>
struct Floats : V {
  using Vector = typename V::Vector;
  using Weight = float;
  using Operand = Vector;
  using RunningMax = Vector;
  static constexpr int kStep = 1;

  static INLINE Operand get(const Operand* from) { return *from; }
  static INLINE void put(Operand* to, Operand x) { *to = x; }
  static INLINE Operand broadcast(const Weight* from) { return V::set(*from); }
  static INLINE Vector dot(Vector sum, Operand x, Operand y) { return V::fma(x, y, sum); }
  static float exponent_scale(float factor) { return factor; }
  static float exponent_offset(float base) { return -base; }
  static INLINE RunningMax initial_max() { return V::set(-INFINITY); }
  static INLINE bool exceeds_base(RunningMax x) { return V::any_positive(x); }
  static INLINE void exp_weights(const Vector (&scores)[2], Vector scale, Vector offset, float* sum,
                                 Weight* to, RunningMax& highest) {
    const Vector low = V::fma(scores[0], scale, offset), high = V::fma(scores[1], scale, offset);
    highest = V::max(highest, V::max(low, high));
    const Vector one = V::exp2(low), other = V::exp2(high);
    V::store(to, one);
    V::store(to + V::kWidth, other);
    V::store(sum, V::add(V::load(sum), V::add(one, other)));
  }
};

}  // namespace
