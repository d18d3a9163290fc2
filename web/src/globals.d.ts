declare const LICENCES: string; // of what is bundled; see vite.config.ts
