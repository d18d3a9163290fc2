// Keeps what was asked for last while the next answer is on its way.

import { NoServer } from "./answers.ts";
import { useEffect, useRef, useState } from "preact/hooks";

export interface Asked<T> { data: T | null; error: string | null; busy: boolean }

/** Asks again whenever one of `keys` changes; null as `ask` asks nothing. An answer that comes too late is dropped. */
export function useAnswer<T>(ask: (() => Promise<T>) | null, keys: unknown[]): Asked<T> {
  const [found, put] = useState<Asked<T>>({ data: null, error: null, busy: true });
  const turn = useRef(0);
  useEffect(() => {
    const mine = ++turn.current;
    if (!ask) {
      put({ data: null, error: null, busy: false });
      return;
    }
    put((before) => ({ ...before, busy: true }));
    ask().then(
      (data) => mine === turn.current && put({ data, error: null, busy: false }),
      (error: unknown) => mine === turn.current && put(({ data }) =>
        error instanceof NoServer && data !== null // what was seen last stays
          ? { data, error: null, busy: false }
          : { data: null, error: String((error as Error).message ?? error), busy: false }),
    );
  }, keys);
  return found;
}

/** The width and height of an element, as they change. */
export function useSize(): [(element: HTMLElement | null) => void, { width: number; height: number }] {
  const [size, put] = useState({ width: 0, height: 0 });
  const observer = useRef<ResizeObserver | null>(null);
  const ref = useRef((element: HTMLElement | null) => {
    observer.current?.disconnect();
    if (!element) return;
    const look = (): void => {
      const { clientWidth: width, clientHeight: height } = element;
      put((before) => (before.width === width && before.height === height ? before : { width, height }));
    };
    observer.current = new ResizeObserver(look);
    observer.current.observe(element);
    look();
  });
  return [ref.current, size];
}

/** A style in which numbers are pixels. */
export function px(style: Record<string, string | number | undefined>): Record<string, string | undefined> {
  return Object.fromEntries(Object.entries(style).map(([name, value]) => [name, typeof value === "number" ? `${value}px` : value]));
}
